// SPDX-License-Identifier: Apache-2.0

package sparse

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// TopK is what one step of a sequence asks for.
type TopK struct {
	Step    int        // below 0: a query of the prefill, as for a warm-up
	Context int        // entries that the first query may ask for; each later one has one more
	Queries int        // of the step, as of MTP
	Entries [][]uint32 // by layer: of all queries, one list behind the other
}

// Bounds of a file of a recorded series.
const (
	SeriesLineMax    = 2 << 20 // bytes
	SeriesLayersMax  = 256
	SeriesQueriesMax = 16
	SeriesContextMax = 1 << 20
)

// ErrSeries is an error of a record of a series.
var ErrSeries = errors.New("not a record of a series")

// SeriesError says which line of a recorded series is broken, and how.
type SeriesError struct {
	Line int // from 1
	Err  error
}

// Error names the line.
func (e *SeriesError) Error() string { return fmt.Sprintf("series line %d: %v", e.Line, e.Err) }

// Unwrap returns what is wrong with the line.
func (e *SeriesError) Unwrap() error { return e.Err }

// SeriesReader reads a recorded series of one sequence, and holds one step at a time. A line is a
// record, the JSON object of a step and a layer; docs/sparse.md has the format.
type SeriesReader struct {
	lines  *bufio.Scanner
	line   int
	ahead  *seriesRecord // the first one of the next step
	layers int           // of each step; 0: not known yet
	err    error
}

// seriesRecord has pointers, so that a missing field is not taken for zero.
type seriesRecord struct {
	Step    *int       `json:"step"`
	Layer   *int       `json:"layer"`
	Context *int       `json:"context"`
	Entries [][]uint32 `json:"entries"` // by query
}

// NewSeriesReader returns a reader of r.
func NewSeriesReader(r io.Reader) *SeriesReader {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), SeriesLineMax)
	return &SeriesReader{lines: lines}
}

// Next reads the next step, or returns io.EOF behind the last one. For a record that is not as it
// must be it returns a *SeriesError, and further calls return the same error.
func (r *SeriesReader) Next(t *TopK) error {
	if r.err == nil {
		r.err = r.next(t)
	}
	return r.err
}

func (r *SeriesReader) next(t *TopK) (err error) {
	first := r.ahead
	if first == nil {
		if first, err = r.record(); err != nil {
			return err
		}
	}
	if *first.Layer != 0 {
		return r.wrong("step %d begins with layer %d, want 0", *first.Step, *first.Layer)
	}
	*t = TopK{*first.Step, *first.Context, len(first.Entries), t.Entries[:0]}
	for q := first; ; {
		if len(q.Entries) != t.Queries || *q.Context != t.Context {
			return r.wrong("%d queries of a context of %d, and %d of %d in layer 0 of the step",
				len(q.Entries), *q.Context, t.Queries, t.Context)
		}
		var all []uint32
		for _, list := range q.Entries {
			all = append(all, list...)
		}
		t.Entries = append(t.Entries, all)
		if q, err = r.record(); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if err != nil || *q.Step != t.Step {
			r.ahead = q
			break
		}
		if *q.Layer != len(t.Entries) {
			return r.wrong("layer %d behind layer %d", *q.Layer, len(t.Entries)-1)
		}
	}
	switch {
	case r.layers != 0 && len(t.Entries) != r.layers:
		return r.wrong("step %d has ended with %d layers, and those before have %d", t.Step,
			len(t.Entries), r.layers)
	case r.ahead != nil && *r.ahead.Step < t.Step:
		return r.wrong("step %d behind step %d", *r.ahead.Step, t.Step)
	}
	r.layers = len(t.Entries)
	return nil
}

// record reads one line. Fields it does not know are ignored.
func (r *SeriesReader) record() (*seriesRecord, error) {
	for r.lines.Scan() {
		r.line++
		text := bytes.TrimSpace(r.lines.Bytes())
		if len(text) == 0 {
			continue
		}
		q := &seriesRecord{}
		if err := json.Unmarshal(text, q); err != nil {
			return nil, &SeriesError{r.line, fmt.Errorf("%w: %w", ErrSeries, err)}
		}
		return q, r.check(q)
	}
	switch err := r.lines.Err(); {
	case err == nil:
		return nil, io.EOF
	case errors.Is(err, bufio.ErrTooLong):
		r.line++
		return nil, r.wrong("longer than %d bytes", SeriesLineMax)
	default:
		return nil, fmt.Errorf("read series behind line %d: %w", r.line, err)
	}
}

func (r *SeriesReader) check(q *seriesRecord) error {
	switch {
	case q.Step == nil || q.Layer == nil || q.Context == nil || q.Entries == nil:
		return r.wrong("want step, layer, context and entries")
	case *q.Layer < 0 || *q.Layer >= SeriesLayersMax:
		return r.wrong("layer %d, want 0 to %d", *q.Layer, SeriesLayersMax-1)
	case *q.Context < 1 || *q.Context > SeriesContextMax:
		return r.wrong("a context of %d, want 1 to %d", *q.Context, SeriesContextMax)
	case len(q.Entries) < 1 || len(q.Entries) > SeriesQueriesMax:
		return r.wrong("%d queries, want 1 to %d", len(q.Entries), SeriesQueriesMax)
	}
	for i, list := range q.Entries {
		if len(list) == 0 {
			return r.wrong("query %d has no entry", i)
		}
		for _, entry := range list {
			if uint64(entry) >= uint64(*q.Context+i) {
				return r.wrong("entry %d of query %d, whose context has %d", entry, i, *q.Context+i)
			}
		}
	}
	return nil
}

func (r *SeriesReader) wrong(format string, args ...any) error {
	return &SeriesError{r.line, fmt.Errorf(format+": %w", append(args, ErrSeries)...)}
}
