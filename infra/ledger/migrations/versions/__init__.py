"""Steps, numbered in order. A step that has been released is never changed."""
