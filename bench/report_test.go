// SPDX-License-Identifier: Apache-2.0

package bench

import "testing"

// TestRatiosOfOurs: over each yardstick of the shape that has a figure.
func TestRatiosOfOurs(t *testing.T) {
	r := &Report{Rows: []Row{{Peer: "ours", Ours: true, GBps: 6}, {Peer: "theirs", GBps: 3},
		{Peer: "memcpy", Yardstick: true, GBps: 4}, {Peer: "fio", Yardstick: true}}}
	r.compare(r.Rows)
	if ratios := r.Rows[0].Ratios; len(ratios) != 1 || ratios["memcpy"] != 1.5 ||
		r.Rows[1].Ratios != nil || r.Rows[2].Ratios != nil {
		t.Errorf("%+v", r.Rows)
	}
	if text := beside(&r.Rows[0]); text != "  1.50 of memcpy" {
		t.Errorf("%q", text)
	}
}

// TestMemoryOfDefaultShapes: a report names it, unless the shapes are the command line's.
func TestMemoryOfDefaultShapes(t *testing.T) {
	o := Options{Memory: 7, Shapes: map[Lane][]Shape{}}
	if got := newReport(o).Memory; got != 7 {
		t.Errorf("default shapes: %d", got)
	}
	o.Shapes[Host] = []Shape{{Size: 1}}
	if got := newReport(o).Memory; got != 0 {
		t.Errorf("shapes of the command line: %d", got)
	}
}
