"""What the stack is measured against: the same models and features, put together in two usual ways."""
