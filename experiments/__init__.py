"""What nobody needs to use specjax: counts and comparisons that its authors repeat."""
