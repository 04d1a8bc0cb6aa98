"""From a target to what a drafter trains on: chats, features, anchors, blocks; no loss, no optimiser."""
