"""A posterior over a network's weights: particles that train, are compacted and predict together."""

from bayestrain.posterior.laplace import Laplace, laplace
from bayestrain.posterior.likelihoods import Classification, FunctionLikelihood, Likelihood, Regression, as_likelihood
from bayestrain.posterior.model import Joint, ParticleModel
from bayestrain.posterior.posterior import Posterior, PosteriorStep, around, independent
from bayestrain.posterior.prediction import ClassPrediction, Prediction, RegressionPrediction, auroc, fit_temperature

__all__ = [
    "ClassPrediction", "Classification", "FunctionLikelihood", "Joint", "Laplace", "Likelihood", "ParticleModel",
    "Posterior", "PosteriorStep", "Prediction", "Regression", "RegressionPrediction", "around", "as_likelihood",
    "auroc", "fit_temperature", "independent", "laplace",
]  # fmt: skip
