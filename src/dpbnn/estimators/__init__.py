"""Estimators that feel like scikit-learn's, and state their privacy."""

from dpbnn.estimators.classifier import PrivateBayesClassifier
from dpbnn.estimators.regressor import PrivateBayesRegressor

__all__ = ["PrivateBayesClassifier", "PrivateBayesRegressor"]
