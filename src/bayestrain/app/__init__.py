"""What people use around the library: the command line, the HTML report, data sets and the embedded example."""
