"""The command line ``quiver``: one small file a command family; parse, call one function, print."""
