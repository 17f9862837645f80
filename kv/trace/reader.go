// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// LineMax bounds a line: 1 MiB holds the ids of 40 million tokens.
const LineMax = 1 << 20

// LineError says which line of a trace is broken, and how.
type LineError struct {
	Line int // from 1
	Err  error
}

// Error names the line.
func (e *LineError) Error() string { return fmt.Sprintf("trace line %d: %v", e.Line, e.Err) }

// Unwrap returns what is wrong with the line.
func (e *LineError) Unwrap() error { return e.Err }

// Reader reads a trace line by line, and holds one line at a time. A Reader is not safe for
// concurrent use.
type Reader struct {
	lines *bufio.Scanner
	line  int
	err   error
}

// NewReader returns a Reader of r. It skips empty lines.
func NewReader(r io.Reader) *Reader {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), LineMax)
	return &Reader{lines: lines}
}

// Next returns the next request, or io.EOF after the last one. For an invalid line it returns a
// *LineError, and further calls return the same error.
func (r *Reader) Next() (Request, error) {
	for r.err == nil && r.lines.Scan() {
		r.line++
		text := bytes.TrimSpace(r.lines.Bytes())
		if len(text) == 0 {
			continue
		}
		q, err := parse(text)
		if err == nil {
			return q, nil
		}
		r.err = &LineError{r.line, err}
	}
	if r.err == nil {
		r.err = r.end()
	}
	return Request{}, r.err
}

func (r *Reader) end() error {
	err := r.lines.Err()
	switch {
	case err == nil:
		return io.EOF
	case errors.Is(err, bufio.ErrTooLong):
		return &LineError{r.line + 1, fmt.Errorf("longer than %d bytes: %w", LineMax, ErrRequest)}
	}
	return fmt.Errorf("read trace behind line %d: %w", r.line, err)
}

// fields has pointers, so that parse can tell a missing field from zero.
type fields struct {
	Timestamp    *int64   `json:"timestamp"`
	InputLength  *int     `json:"input_length"`
	OutputLength *int     `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
}

// parse reads one line. Fields it does not know are ignored: other traces carry
// more of them.
func parse(text []byte) (Request, error) {
	var f fields
	if err := json.Unmarshal(text, &f); err != nil {
		return Request{}, err
	}
	switch {
	case f.Timestamp == nil:
		return Request{}, fmt.Errorf("no timestamp: %w", ErrRequest)
	case f.InputLength == nil:
		return Request{}, fmt.Errorf("no input_length: %w", ErrRequest)
	case f.OutputLength == nil:
		return Request{}, fmt.Errorf("no output_length: %w", ErrRequest)
	case f.HashIDs == nil:
		return Request{}, fmt.Errorf("no hash_ids: %w", ErrRequest)
	}
	q := Request{*f.Timestamp, *f.InputLength, *f.OutputLength, f.HashIDs}
	return q, q.Check()
}
