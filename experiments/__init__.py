"""Commands that train, measure and explain; they import the library, never the reverse."""
