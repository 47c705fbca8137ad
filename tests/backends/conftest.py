"""What tests of every backend want; its folder is where they find `cases` and `drawn`."""
