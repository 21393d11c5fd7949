"""The commands of `gem`, one a file; each imports what it needs when it is called."""
