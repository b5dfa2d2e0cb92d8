#!/usr/bin/env bash
# Tidemark with nothing but curl: `. data/env && examples/curl.sh`.
set -euo pipefail

api() { curl --silent --show-error --fail-with-body "$@"; echo; }

echo "A key, and ids from it:"
api "$TIDEMARK_URL/v1/config/increment" -H "Authorization: Bearer $TIDEMARK_ADMIN_TOKEN" -d '{"key": "curl", "base": 0}'
api "$TIDEMARK_URL/v1/id/increment?key=curl&size=3" -H "X-API-Key: $TIDEMARK_API_KEY"

echo "A pool of short ids with a check character:"
pool="curl-$(date +%s%N)"
api "$TIDEMARK_URL/pools" -d "name=$pool" -d template=.reeddeeddk
api "$TIDEMARK_URL/pools/$pool/mint" -d n=2

echo "A stage, and the same one again:"
request=$(cat /proc/sys/kernel/random/uuid)
api "$TIDEMARK_URL/stages" -H "X-Request-ID: $request" -d '{}'
api "$TIDEMARK_URL/stages" -H "X-Request-ID: $request" -d '{}'

echo "A timer, and canceled before it fires:"
timer=$(api "$TIDEMARK_URL/timers" -H "X-API-Key: $TIDEMARK_API_KEY" \
  -d '{"execute_in": "1h", "callback": {"type": "http", "url": "https://example.com/wake"}}' | grep -o '"id":"[^"]*"' | cut -d'"' -f4)
api -X DELETE "$TIDEMARK_URL/timers/$timer" -H "X-API-Key: $TIDEMARK_API_KEY"

echo "What the ledger has:"
api "$TIDEMARK_URL/api/uc/v1/usage/metadata" -H "X-API-Key: $TIDEMARK_API_KEY"
