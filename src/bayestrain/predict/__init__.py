"""What a posterior says about data: tensors of its particles in, predictions and their uncertainty out."""

from bayestrain.predict.calibration import at_temperature, fit_temperature
from bayestrain.predict.classification import ClassPrediction
from bayestrain.predict.density import JointDensity
from bayestrain.predict.likelihoods import Classification, Likelihood, Regression, check_log_prob
from bayestrain.predict.metrics import (
    ECE_BINS,
    RiskCoverage,
    auroc,
    check_classes,
    checked_labels,
    classification_metrics,
    risk_coverage,
)
from bayestrain.predict.prediction import Prediction
from bayestrain.predict.regression import RegressionPrediction

__all__ = [
    "ECE_BINS",
    "ClassPrediction",
    "Classification",
    "JointDensity",
    "Likelihood",
    "Prediction",
    "Regression",
    "RegressionPrediction",
    "RiskCoverage",
    "at_temperature",
    "auroc",
    "check_classes",
    "check_log_prob",
    "checked_labels",
    "classification_metrics",
    "fit_temperature",
    "risk_coverage",
]
