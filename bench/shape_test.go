// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func TestShapeBounds(t *testing.T) {
	good := Shape{Op: driver.Write, Size: 656, Batch: 64, Threads: 1}
	require.NoError(t, good.Check())
	for name, change := range map[string]func(*Shape){
		"no operation":    func(s *Shape) { s.Op = 0 },
		"no bytes":        func(s *Shape) { s.Size = 0 },
		"huge piece":      func(s *Shape) { s.Size = 2 << 30 },
		"no batch":        func(s *Shape) { s.Batch = 0 },
		"huge batch":      func(s *Shape) { s.Batch = 1 << 20 },
		"no threads":      func(s *Shape) { s.Threads = 0 },
		"huge spread":     func(s *Shape) { s.Spread = 1 << 40 },
		"all of it large": func(s *Shape) { s.Size, s.Batch, s.Threads = 1<<30, 4, 2 },
	} {
		s := good
		change(&s)
		if err := s.Check(); !errors.Is(err, ErrShape) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPlansStayWithinAndApart(t *testing.T) {
	for _, s := range []Shape{
		{Op: driver.Write, Size: 1 << 20, Batch: 16, Threads: 2},
		{Op: driver.Read, Size: 1, Batch: 1, Threads: 3},
		{Op: driver.Write, Size: 656, Batch: 2048, Pages: true, Spread: 64 << 20, Threads: 2},
		{Op: driver.Write, Size: 8 << 20, Batch: 64, Pages: true, Threads: 1},
	} {
		taken := map[uint64]bool{}
		for _, p := range s.plans() {
			if p.compact+uint64(s.Batch)*s.stride() > s.CompactBytes() {
				t.Errorf("%+v: local part at %d is past %d bytes", s, p.compact, s.CompactBytes())
			}
			seen := map[uint64]bool{}
			for _, slot := range p.places[0] {
				at := p.scattered + uint64(slot)*s.stride()
				if seen[at] || taken[at] {
					t.Fatalf("%+v: two pieces at %d", s, at)
				}
				seen[at] = true
				if at+s.Size > s.ScatteredBytes() {
					t.Fatalf("%+v: piece at %d is past %d bytes", s, at, s.ScatteredBytes())
				}
			}
			for at := range seen {
				taken[at] = true
			}
		}
	}
}

// TestNeighboursAreRare keeps merging engines from moving one long piece.
func TestNeighboursAreRare(t *testing.T) {
	s := Shape{Op: driver.Write, Size: 1 << 20, Batch: 16, Threads: 4}
	for _, p := range s.plans() {
		places, rows := p.places[0], 0
		for i := 1; i < len(places); i++ {
			if places[i] == places[i-1]+1 {
				rows++
			}
		}
		if rows > 2 {
			t.Errorf("%d of 15 pieces follow their neighbour: %v", rows, places)
		}
	}
}
