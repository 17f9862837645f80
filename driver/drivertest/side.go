// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/testing/promise"
)

// side gives orders to a party and fails the test where one cannot be obeyed.
type side struct {
	testing.TB
	party
	name  string // "near" or "far"
	limit time.Duration
	late  func() // Harness.Settle
}

// must obeys an order that has no reason to fail.
func (s *side) must(q request) reply {
	s.Helper()
	if q.Limit == 0 {
		q.Limit = s.limit
	}
	r := s.do(q)
	if r.Err != nil {
		s.Fatalf("%s side: %s: %v", s.name, q.Do, r.Err)
	}
	return r
}

// try obeys an order that may fail.
func (s *side) try(q request) (reply, error) {
	if q.Limit == 0 {
		q.Limit = s.limit
	}
	r := s.do(q)
	return r, r.Err.orNil()
}

// memory is registered memory of one side, with a model of what it must hold.
type memory struct {
	on    *side
	id    int
	size  uint64
	key   uint32 // what its own side calls it
	as    uint32 // what the other side calls it, once imported
	token []byte
	want  []byte
}

// share is memory that the other side reaches: of the harness's Remote kind.
func (s *side) share(size uint64) *memory {
	return s.memory(request{Do: "add", Len: size, Remote: true})
}

// shareReadOnly is share for memory that peers must not write.
func (s *side) shareReadOnly(size uint64) *memory {
	return s.memory(request{Do: "add", Len: size, Remote: true, ReadOnly: true})
}

// local is memory for this side's own transfers: of the harness's Local kind.
func (s *side) local(size uint64) *memory { return s.memory(request{Do: "add", Len: size}) }

// slice registers a part of m once more. Both models go their own ways.
func (m *memory) slice(off, n uint64) *memory {
	part := m.on.memory(request{Do: "slice", Region: m.id, Off: off, Len: n})
	copy(part.want, m.want[off:])
	return part
}

func (s *side) memory(q request) *memory {
	s.Helper()
	r := s.must(q)
	return &memory{on: s, id: r.ID, size: q.Len, key: r.Key, token: r.Data, want: model(s, q.Len)}
}

// paint fills all of m anew.
func (m *memory) paint(seed uint64) {
	m.on.Helper()
	m.paintAt(0, m.size, seed)
}

// paintAt fills a range as the owner of the memory would.
func (m *memory) paintAt(off, n, seed uint64) {
	m.on.Helper()
	m.on.must(request{Do: "paint", Region: m.id, Off: off, Len: n, Seed: seed})
	paint(m.want[off:off+n], seed)
}

// expect compares every byte with the model.
func (m *memory) expect(when string) bool {
	m.on.Helper()
	if m.same() {
		return true
	}
	got := m.on.must(request{Do: "get", Region: m.id, Len: m.size}).Data
	promise.Breaks(m.on, "%s: memory of the %s side: %s", when, m.on.name, difference(got, m.want))
	return false
}

func (m *memory) same() bool {
	m.on.Helper()
	sum := m.on.must(request{Do: "digest", Region: m.id, Len: m.size}).Data
	return bytes.Equal(sum, digest(m.want))
}

// watch looks at the bytes for a while: nothing may land in them.
func (m *memory) watch(when string, d time.Duration) bool {
	m.on.Helper()
	for end := time.Now().Add(d); ; time.Sleep(d / 8) {
		if !m.expect(when) {
			return false
		}
		if !time.Now().After(end) {
			continue
		}
		if m.on.late == nil {
			return true
		}
		m.on.late()
		return m.expect(when)
	}
}

// again registers the bytes of m once more, when m was revoked: it has another key and token.
func (m *memory) again() {
	m.on.Helper()
	r := m.on.must(request{Do: "again", Region: m.id})
	m.id, m.key, m.token = r.ID, r.Key, r.Data
}

func (m *memory) revoke() error {
	_, err := m.on.try(request{Do: "revoke", Region: m.id})
	return err
}
