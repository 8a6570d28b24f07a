"""Choose the speed levers of a level by measuring them on the user's model, batch and machine."""
