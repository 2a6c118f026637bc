"""A posterior over a network's weights: particles that train, are compacted and predict together.

`Likelihood` and its kinds also serve a single network; `ClassPrediction` and `RegressionPrediction` say what is
predicted and how certain it is.
"""

from bayestrain.posterior.joint import Joint
from bayestrain.posterior.likelihoods import Classification, FunctionLikelihood, Likelihood, Regression, as_likelihood
from bayestrain.posterior.metrics import at_temperature, auroc, classification_metrics, fit_temperature
from bayestrain.posterior.model import ParticleModel
from bayestrain.posterior.posterior import Posterior, PosteriorStep
from bayestrain.posterior.prediction import ClassPrediction, Prediction, RegressionPrediction
from bayestrain.posterior.starts import around, independent

__all__ = [
    "ClassPrediction", "Classification", "FunctionLikelihood", "Joint", "Likelihood", "ParticleModel", "Posterior",
    "PosteriorStep", "Prediction", "Regression", "RegressionPrediction", "around", "as_likelihood", "at_temperature",
    "auroc", "classification_metrics", "fit_temperature", "independent",
]  # fmt: skip
