// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGeneratorMatchesTheTrace holds the generator to the published figures of
// the conversation trace: 12,031 requests in 3,537 s, 12,035 tokens in (at most
// 126,195), 343 out, 36.6 % reuse.
func TestGeneratorMatchesTheTrace(t *testing.T) {
	for seed := range uint64(5) {
		s := measure(t, NewGenerator(seed), 12031)
		for _, c := range []struct {
			what           string
			got, want, off float64
		}{
			{"tokens in", s.in, 12035, 0.02},
			{"tokens out", s.out, 343, 0.02},
			{"reuse", s.reuse, 0.366, 0.01},
			{"seconds", s.seconds, 3537, 0.04},
			{"turns of earlier conversations", s.continued, 0.387, 0.25},
		} {
			if math.Abs(c.got/c.want-1) > c.off {
				t.Errorf("seed %d: %s: %.3f, want %.3f within %.0f %%", seed, c.what, c.got, c.want,
					100*c.off)
			}
		}
		if s.longest > 126195 || s.longest < 120000 {
			t.Errorf("seed %d: the longest input has %d tokens", seed, s.longest)
		}
	}
}

func TestShortRunsHaveTheMeanToo(t *testing.T) {
	for seed := range uint64(5) {
		s := measure(t, NewGenerator(seed), 100)
		if s.in < 10000 || s.in > 14000 || s.reuse < 0.33 || s.reuse > 0.41 {
			t.Errorf("seed %d: 100 requests: %.0f tokens in, %.2f reuse", seed, s.in, s.reuse)
		}
	}
}

type statistics struct {
	in, out, reuse, seconds, continued float64
	longest                            int
}

// measure also checks what a trace promises: an id always follows the same id,
// and what a request shares is the beginning of its prompt.
func measure(t *testing.T, g *Generator, n int) (s statistics) {
	t.Helper()
	before := map[uint64]uint64{}
	refs, last := 0, int64(0)
	for range n {
		q := g.Next()
		if err := q.Check(); err != nil || q.Timestamp < last {
			t.Fatalf("request %+v behind %d ms: %v", q, last, err)
		}
		last = q.Timestamp
		shared, previous := 0, uint64(math.MaxUint64)
		for i, id := range q.HashIDs {
			parent, known := before[id]
			if known && (parent != previous || shared != i) {
				t.Fatalf("id %d follows %d and %d, or is shared behind new ones", id, parent,
					previous)
			}
			if known {
				shared++
			}
			before[id], previous = previous, id
		}
		if shared > 1 {
			s.continued++
		}
		s.in, s.out = s.in+float64(q.InputLength), s.out+float64(q.OutputLength)
		s.longest, refs = max(s.longest, q.InputLength), refs+len(q.HashIDs)
	}
	s.reuse, s.seconds = 1-float64(len(before))/float64(refs), float64(last)/1e3
	s.in, s.out, s.continued = s.in/float64(n), s.out/float64(n), s.continued/float64(n)
	return s
}

func TestGeneratorIsDeterministic(t *testing.T) {
	a, b, c := NewGenerator(7), NewGenerator(7), NewGenerator(8)
	differs := false
	for range 200 {
		qa, qb, qc := a.Next(), b.Next(), c.Next()
		require.Equal(t, qb, qa)
		differs = differs || !reflect.DeepEqual(qa, qc)
	}
	require.True(t, differs, "another seed made the same requests")
}

func TestGeneratedRequestsCanBeRead(t *testing.T) {
	var text strings.Builder
	g, again := NewGenerator(1), NewGenerator(1)
	lines := json.NewEncoder(&text)
	for range 50 {
		require.NoError(t, lines.Encode(g.Next()))
	}
	r := NewReader(strings.NewReader(text.String()))
	for range 50 {
		if q, err := r.Next(); err != nil || !reflect.DeepEqual(q, again.Next()) {
			t.Fatalf("read %+v, %v", q, err)
		}
	}
}
