"""What we claim, measured: each bench is a file, joins the verbs, and is run by the command line only."""
