"""The data sets, networks and named trainings of the command line. Data need the extra ``workloads``."""
