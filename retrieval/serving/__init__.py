"""HTTP service for searching indexes, with a search page. Needs the extra ``serve``; imported by ``quiver serve`` only."""
