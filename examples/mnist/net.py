"""The convolutional net of PyTorch's MNIST and FSDP examples, in plain PyTorch: 1.2 million parameters."""

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * 12 * 12, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 1, 28, 28) -> log-probabilities of the ten digits (B, 10)."""
        return F.log_softmax(self.classifier(self.features(images)), dim=1)
