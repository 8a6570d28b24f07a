"""Find out which algorithms pay on a model without losing accuracy: candidates, trainings, a race, a report."""
