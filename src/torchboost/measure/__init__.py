"""Clock, statistics and evidence."""
