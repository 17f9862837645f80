// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
)

const goodLine = `{"timestamp": 27482, "input_length": 513, "output_length": 52, "hash_ids": [46, 18446744073709551615]}`

func TestReads(t *testing.T) {
	text := goodLine + "\r\n\n  \n" +
		`{"chat": 7, "timestamp": 27483, "input_length": 512, "output_length": 0, "hash_ids": [46]}`
	r := NewReader(strings.NewReader(text))
	for _, want := range []Request{
		{27482, 513, 52, []uint64{46, 1<<64 - 1}},
		{27483, 512, 0, []uint64{46}},
	} {
		got, err := r.Next()
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("read %+v, %v, want %+v", got, err, want)
		}
	}
	for range 2 {
		if _, err := r.Next(); !errors.Is(err, io.EOF) {
			t.Fatalf("at the end: %v", err)
		}
	}
}

func TestBrokenLineIsNamed(t *testing.T) {
	for what, line := range map[string]string{
		"not JSON":              `timestamp=3`,
		"cut":                   goodLine[:40],
		"two objects":           goodLine + goodLine,
		"null":                  `null`,
		"an array":              `[1, 2]`,
		"a negative time":       `{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}`,
		"a time too large":      `{"timestamp": 9000000000000, "input_length": 1, "output_length": 1, "hash_ids": [1]}`,
		"a negative input":      `{"timestamp": 1, "input_length": -512, "output_length": 1, "hash_ids": []}`,
		"an input too large":    `{"timestamp": 1, "input_length": 99999999999, "output_length": 1, "hash_ids": []}`,
		"a negative output":     `{"timestamp": 1, "input_length": 1, "output_length": -1, "hash_ids": [1]}`,
		"a negative id":         `{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}`,
		"a fraction":            `{"timestamp": 1.5, "input_length": 1, "output_length": 1, "hash_ids": [1]}`,
		"too few ids":           `{"timestamp": 1, "input_length": 1025, "output_length": 1, "hash_ids": [1]}`,
		"too many ids":          `{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}`,
		"no timestamp":          `{"input_length": 1, "output_length": 1, "hash_ids": [1]}`,
		"no input_length":       `{"timestamp": 1, "output_length": 1, "hash_ids": []}`,
		"no output_length":      `{"timestamp": 1, "input_length": 1, "hash_ids": [1]}`,
		"no hash_ids":           `{"timestamp": 1, "input_length": 0, "output_length": 1}`,
		"longer than the bound": goodLine + strings.Repeat(" ", LineMax),
	} {
		r := NewReader(strings.NewReader(goodLine + "\n\n" + line + "\n" + goodLine + "\n"))
		if _, err := r.Next(); err != nil {
			t.Fatalf("%s: the good line: %v", what, err)
		}
		for range 2 { // the error stays
			_, err := r.Next()
			var broken *LineError
			if !errors.As(err, &broken) || broken.Line != 3 ||
				!strings.Contains(err.Error(), "line 3") {
				t.Errorf("%s: %v, want an error that names line 3", what, err)
			}
		}
	}
}

func TestReadErrorIsPassedOn(t *testing.T) {
	r := NewReader(io.MultiReader(strings.NewReader(goodLine+"\n"), failing{}))
	if _, err := r.Next(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Next(); !errors.Is(err, io.ErrClosedPipe) {
		t.Error(err)
	}
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrClosedPipe }

func FuzzReader(f *testing.F) {
	f.Add(goodLine)
	f.Add(goodLine[:50] + "\n" + goodLine)
	f.Fuzz(func(t *testing.T, text string) {
		r := NewReader(strings.NewReader(text))
		for q, err := r.Next(); err == nil; q, err = r.Next() {
			if q.Check() != nil {
				t.Errorf("accepted %+v", q)
			}
		}
	})
}

// TestTraceOfFullBlocks: some traces have no id of a last block that is not full.
func TestTraceOfFullBlocks(t *testing.T) {
	r := NewReader(strings.NewReader(
		`{"timestamp": 1, "input_length": 1025, "output_length": 1, "hash_ids": [1, 2]}`))
	q, err := r.Next()
	if err != nil || len(q.HashIDs) != 2 {
		t.Errorf("%v, %v", q, err)
	}
}
