"""Train a small one-stage detector (FCOS) on pictures with any number of objects.

    unisono run detection --ranks 2                              drawn pictures of shapes
    unisono run detection --ranks 2 --set data=FOLDER            your own: train.json and val.json in COCO's format
    unisono copy detection mine.py                               then edit it and: unisono run mine.py

Data     2,000 pictures of 0 to 5 shapes, which are drawn at the first start; or COCO's files
Model    0.2 million parameters: two grids of cells, each of which predicts a class and the distances to four edges
Result   mAP@0.5 of 95.8 % on 400 drawn pictures after twelve epochs: the mean over classes of the
         average precision at an intersection over union of 0.5
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import unisono
from unisono.recipes.datasets.class_folders import files_of
from unisono.recipes.vision.anchor_free_detector import Detector, cells_of, detection_loss, detections
from unisono.recipes.vision.average_precision import average_precisions
from unisono.recipes.vision.box_annotations import (
    Annotations,
    BoxedPictures,
    Sample,
    pad_boxes,
    read_annotations,
    to_square,
)
from unisono.recipes.vision.drawn_shapes import cached, write_scenes
from unisono.recipes.vision.picture_files import SUFFIXES, Opened, pillow
from unisono.recipes.vision.picture_sets import PictureFiles


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    data: Path | None = None  # folder with train.json and val.json in COCO's format, and pictures in train/ and val/
    drawn: int = 2000  # number of training pictures to draw, without data
    size: int = 96  # width and height of the square that each picture is scaled into; a multiple of 16
    batch: int = 32
    epochs: int | None = 12
    lr: float = 4e-3  # peak learning rate of the one-cycle schedule
    weight_decay: float = 0.01  # weight decay of AdamW
    clip: float | None = 5.0
    jitter: float = 0.3  # largest relative change of brightness, contrast and saturation
    most: int = 20  # most detections in a picture
    width: int = 16  # channels of the first stage; the last one has four times as many

    def __post_init__(self) -> None:
        """Refuse sizes and parallelism that the model does not support."""
        if self.size % 16 or self.size < 16:
            raise unisono.SettingsError(
                f"The detection recipe cannot have size={self.size}.",
                "A cell of the coarse grid has 16 x 16 pixels.",
                f"--set size={max(16, self.size // 16 * 16)}",
            )
        self.parallel.refuse("The detection recipe", "It replicates the model, or shards its parameters.")


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    with run.first():  # one process per host draws, the others use its files
        train, valid = load(settings)
    crowds = f", {train.crowds + valid.crowds} boxes of crowds left out" if train.crowds + valid.crowds else ""
    count = sum(len(picture.labels) for picture in train.pictures)
    run.print(
        f"{len(train.pictures):,} pictures with {count:,} objects for training, {len(valid.pictures):,} for "
        f"validation, {len(train.classes)} classes{crowds}"
    )
    skip = settings.loader.on_error == "skip"
    train_set = BoxedPictures(train.pictures, settings.size, jitter=settings.jitter, skip=skip)
    valid_set = BoxedPictures(valid.pictures, settings.size)
    cells = cells_of(settings.size)

    model = run.place(lambda: Detector(len(train.classes), settings.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    total_steps = run.count_steps(train_set)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=total_steps)
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    def loss_sum(output: Tensor, pictures: Tensor, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return detection_loss(output, cells, boxes, labels)

    for step in run.steps(train_set, collate_fn=pad_boxes):
        step.run(model, loss_sum)
        step.update(optimizer, schedule, clip=settings.clip)
        run.log(loss=step.loss)

    def forward(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor, Tensor]:
        return detections(model(batch[0]), cells, settings.most), batch[1], batch[2]

    objects = max(len(picture.labels) for picture in valid.pictures)  # so that all rows have one shape
    found = run.predict(model, valid_set, forward=forward, collate_fn=partial(pad_boxes, least=objects))
    precisions = average_precisions(found[0], found[1], found[2], len(train.classes))
    values = dict(zip(train.classes, precisions, strict=True))
    known = {name: value for name, value in values.items() if value is not None}
    result = sum(known.values()) / len(known)
    run.log(map50=result)
    worst = min(known, key=lambda name: known[name])
    run.print(
        f"validation: mAP@0.5 {result:.2%} on {len(valid.pictures):,} held-out pictures (lowest: {worst}, "
        f"{known[worst]:.2%})"
    )


def load(settings: Settings) -> tuple[Annotations, Annotations]:
    """Return the pictures for training and validation, with their boxes."""
    pillow()  # is it installed?
    folder = settings.data
    if folder is None:
        write = partial(write_scenes, pictures=settings.drawn, valid=max(2, settings.drawn // 5))
        folder = cached(f"scenes-{settings.drawn}", write)
    train, valid = (read_annotations(folder.expanduser() / f"{part}.json") for part in ("train", "val"))
    if train.classes != valid.classes:
        raise unisono.DataError(
            f"{folder}/val.json has other categories than train.json.",
            f"They are {', '.join(valid.classes)}, and those for training {', '.join(train.classes)}.",
            "give both files the same categories.",
        )
    return train, valid


def predict(settings: Settings, model: nn.Module, path: Path) -> unisono.Prediction:
    """Predict the objects in each picture of a folder, or in one picture: class, score, and edges in pixels."""
    classes, files, cells = load(settings)[0].classes, files_of(path, "pictures", SUFFIXES), cells_of(settings.size)
    image = pillow()

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return detections(model(batch[0]), cells, settings.most), batch[1]

    def describe(row: tuple[Tensor, Tensor]) -> dict[str, object]:
        file = files[int(row[1])]
        with image.open(file) as picture:
            scale = settings.size / max(picture.size)
        objects = [
            {"class": classes[int(label)], "score": score, "box": [edge / scale for edge in edges]}
            for *edges, score, label in row[0].tolist()
            if score >= 0
        ]
        return {"file": str(file), "objects": objects}

    def view(opened: Opened) -> Tensor:
        return to_square(opened, [], settings.size, None)[0]

    return unisono.Prediction(PictureFiles(files, view), forward=forward, describe=describe)


if __name__ == "__main__":
    unisono.main(main, Settings, predict=predict)
