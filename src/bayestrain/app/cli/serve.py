"""`bayestrain serve`: predictions with their uncertainty over HTTP, and a page to try them on."""

import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from bayestrain.app.cli.predict import predictor
from bayestrain.app.cli.runs import Device, Finished
from bayestrain.errors import BayesTrainError, ConfigError
from bayestrain.tables import times

LARGEST = 8 << 20  # bytes of a request's body
KINDS = {"application/json": ".json", "text/csv": ".csv", "image/": ".picture"}  # and the file that a body is read as


def serve(
    folder: Finished,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 serves other machines, too.")] = "127.0.0.1",
    device: Device = "auto",
) -> None:
    """Serve a run's predictions: a page, POST /predict and GET /health. Needs pip install 'bayestrain[serve]'.

    Only use runs you trust: the function that a run names is called.

    ```sh
    bayestrain serve runs/digits-seed0 --port 8000
    curl --data-binary @seven.png -H "Content-Type: image/png" localhost:8000/predict
    ```
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing. Install it: pip install 'bayestrain[serve]'") from None
    app = application(folder, device)
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror}. Choose another --port.") from None
    print(f"Serving {folder} on http://{host}:{listener.getsockname()[1]}. Ctrl-C stops it.", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


def application(folder: Path, device: str) -> Any:
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse
    from starlette.exceptions import HTTPException

    from bayestrain.app.report.page import render

    ask, result, particles = predictor(folder, device)
    shape, app = result["input_shape"], FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    about = {"name": result["name"], "particles": particles, "input_shape": shape, "classes": result["classes"]}
    lead = f"One input has the shape {times(shape)}. Networks: {particles}."
    page = render("serve.html.j2", title=about["name"], lead=lead, picture=len(shape) == 3 and shape[0] in (1, 3))
    app.get("/", response_class=HTMLResponse)(lambda: page)
    app.get("/health")(lambda: {"status": "ok", **about})

    @app.exception_handler(OSError)
    @app.exception_handler(MemoryError)
    async def lacking(_: Request, error: Exception) -> Any:
        return JSONResponse({"error": f"The server has no room for this request: {error}."}, 503)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Any:
        reason = f"{request.method} {request.url.path}: {error.detail}. Ask POST /predict, GET /health or GET /."
        return JSONResponse({"error": reason}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Any:
        return JSONResponse({"error": "; ".join(f"{own['loc'][-1]}: {own['msg']}" for own in error.errors())}, 422)

    @app.post("/predict")
    async def predict(request: Request, invert: bool | None = None) -> Any:
        kind, body, size = request.headers.get("content-type", "").lower(), bytearray(), 0
        if not (suffix := next((suffix for known, suffix in KINDS.items() if kind.startswith(known)), "")):
            return JSONResponse({"error": f"The content type must be one of {', '.join(KINDS)}*, got {kind!r}."}, 415)
        async for part in request.stream():
            size += len(part)
            if size <= LARGEST:  # more is read, or else the client may not see the answer, but not kept
                body += part
            elif size > 8 * LARGEST:
                break
        if size > LARGEST:
            reason = f"A body may have {LARGEST:,} bytes. Send less at a time."
            return JSONResponse({"error": reason}, 413, {"Connection": "close"})
        return await run_in_threadpool(answer, bytes(body), suffix, invert)

    def answer(body: bytes, suffix: str, invert: bool | None) -> Any:
        try:
            with TemporaryDirectory() as place:
                file = Path(place, f"input{suffix}")
                file.write_bytes(body)
                rows = ask([file], invert)
        except (BayesTrainError, IndexError) as error:  # an index that a table does not have
            reason = str(error).replace(str(file), "The input")
            return JSONResponse({"error": reason}, 422)
        return {"predictions": [{key: value for key, value in row.items() if key != "input"} for row in rows]}

    return app
