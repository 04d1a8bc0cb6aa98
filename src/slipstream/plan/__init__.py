"""What drafting would bring on a card that is not at hand: arithmetic on configs, no model and no torch."""

from slipstream.plan.acceptance import check_profile, geometric, length
from slipstream.plan.cards import CARDS, CPU, Card, find_card
from slipstream.plan.cost import Constants, Precision, Setting
from slipstream.plan.drafter import described_drafter, read_drafter_shape
from slipstream.plan.predict import Pair, Prediction, Row, predict
from slipstream.plan.shape import Shape, read_shape

__all__ = [
    "CARDS",
    "CPU",
    "Card",
    "Constants",
    "Pair",
    "Precision",
    "Prediction",
    "Row",
    "Setting",
    "Shape",
    "check_profile",
    "described_drafter",
    "find_card",
    "geometric",
    "length",
    "predict",
    "read_drafter_shape",
    "read_shape",
]
