# Built by Modal, which knows fewer instructions than Docker and runs everything as its own user.
FROM python:3.12-slim-bookworm
# bubblewrap isolates programs that a model writes.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*
COPY @folder/stretto /opt/stretto
RUN pip install --no-cache-dir -c /opt/stretto/constraints.txt "/opt/stretto[@extras]"@packages
WORKDIR /workspace
COPY . /workspace
# What your own code needs.
RUN if [ -f requirements.txt ]; then pip install --no-cache-dir -r requirements.txt; fi
COPY @folder/train.sh /opt/train.sh
