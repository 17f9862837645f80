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
