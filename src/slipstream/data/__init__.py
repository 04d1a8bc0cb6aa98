"""From a target alone to what a drafter trains on: chats, features, anchors and blocks; no loss, no optimiser."""
