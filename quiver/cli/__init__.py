"""The command line ``quiver``: one file per command family. A command parses its options, calls the library and prints."""
