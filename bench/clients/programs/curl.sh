# Ways to send a request that few libraries use; URL MODEL.
body='{"prompt": "Hi", "max_tokens": 4, "seed": 1}'
looked() { # WHAT WANTED-STATUS OPTIONS...
    what=$1 wanted=$2
    shift 2
    status=$(curl --silent --max-time 60 --output told --write-out '%{http_code}' "$@")
    if [ "$status" = "$wanted" ]; then echo "passed $what"; else echo "failed $what: $status $(head -c 200 told)"; fi
}
json=(--header "Content-Type: application/json")
head -c 5000000 /dev/zero >large
looked "HTTP/1.0" 200 --http1.0 "${json[@]}" --data "$body" "$1/v1/completions"
looked "HTTP/1.0 streamed" 200 --http1.0 "${json[@]}" --data "${body%\}}, \"stream\": true}" "$1/v1/completions"
looked "Expect: 100-continue" 200 --header "Expect: 100-continue" "${json[@]}" --data "$body" "$1/v1/completions"
looked "a chunked body" 200 --header "Transfer-Encoding: chunked" "${json[@]}" --data "$body" "$1/v1/completions"
looked "an offer of HTTP/2" 200 --http2 "$1/health"
looked "a HEAD" 200 --head "$1/v1/models"
looked "a body without Content-Type refused" 400 --data "$body" "$1/v1/completions"
looked "a packed body refused" 400 --header "Content-Encoding: gzip" "${json[@]}" --data "$body" "$1/v1/completions"
looked "5 MB refused" 413 "${json[@]}" --data-binary @large "$1/v1/completions"
looked "5 MB in chunks refused" 413 --header "Transfer-Encoding: chunked" --data-binary @large "$1/v1/completions"
