// SPDX-License-Identifier: Apache-2.0

// Package trace reads production traces of LLM requests, and generates requests with the same
// statistics when there is no trace.
//
// A trace is a file of JSON lines in the format of the Mooncake paper: arrival time in
// milliseconds, input and output tokens, and the ids of the prompt's blocks. Two requests that
// have an id in common have the same prompt up to the end of that block.
package trace

import (
	"errors"
	"fmt"
	"time"
)

// BlockTokens is the number of tokens in the block of a hash id.
const BlockTokens = 512

// The bounds of a request.
const (
	TokensMax    = 1 << 26                // in or out; a hundred times the longest context there is
	TimestampMax = 10 * 365 * 24 * 3600e3 // ms: ten years
)

// ErrRequest is wrapped by every error about a request's values.
var ErrRequest = errors.New("bad request")

// Request is one line of a trace.
type Request struct {
	Timestamp    int64 `json:"timestamp"`     // of arrival, in ms from the start of the trace
	InputLength  int   `json:"input_length"`  // tokens
	OutputLength int   `json:"output_length"` // tokens
	// one id per block of the input; a last block that is not full may be left out
	HashIDs []uint64 `json:"hash_ids"`
}

// Arrival returns the timestamp as a duration from the start of the trace.
func (r *Request) Arrival() time.Duration { return time.Duration(r.Timestamp) * time.Millisecond }

// Check reports whether the values are within bounds and fit each other.
func (r *Request) Check() error {
	switch {
	case r.Timestamp < 0 || r.Timestamp > TimestampMax:
		return fmt.Errorf("timestamp %d, want 0 to %d: %w", r.Timestamp, int64(TimestampMax),
			ErrRequest)
	case r.InputLength < 0 || r.InputLength > TokensMax:
		return fmt.Errorf("input_length %d, want 0 to %d: %w", r.InputLength, TokensMax, ErrRequest)
	case r.OutputLength < 0 || r.OutputLength > TokensMax:
		return fmt.Errorf("output_length %d, want 0 to %d: %w", r.OutputLength, TokensMax,
			ErrRequest)
	}
	want := blocksFor(r.InputLength)
	if n := len(r.HashIDs); n != want && n != r.InputLength/BlockTokens {
		return fmt.Errorf("%d hash_ids, want %d for %d tokens, or one less where the last block "+
			"is not full: %w", n, want, r.InputLength, ErrRequest)
	}
	return nil
}

func blocksFor(tokens int) int { return (tokens + BlockTokens - 1) / BlockTokens }
