// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"errors"
	"testing"
)

func TestTicksOfProcessors(t *testing.T) {
	for _, c := range []struct {
		name, stat   string
		err          error
		worked, idle float64
	}{
		{"usual", "cpu  10 1 5 100 7 2 3 4 9 9\ncpu0 1 1 1 1 1 1 1 1 0 0\n", nil, 25, 107},
		{"without guests", "cpu 1 1 1 1 1 1 1 1\n", nil, 6, 2},
		{"too short", "cpu 1 2 3\n", nil, 0, 0},
		{"no number", "cpu 1 2 3 4 x 6 7 8\n", nil, 0, 0},
		{"another line", "intr 1 2 3 4 5 6 7 8\n", nil, 0, 0},
		{"no file", "cpu 1 1 1 1 1 1 1 1\n", errors.New("no such file"), 0, 0},
	} {
		if worked, idle := ticks([]byte(c.stat), c.err); worked != c.worked || idle != c.idle {
			t.Errorf("%s: %v at work, %v idle", c.name, worked, idle)
		}
	}
	if n := busy(0); n < 0 {
		t.Errorf("%v processors are busy", n)
	}
}

// TestLoadAverageIsNoJudge: it remembers what built the programs.
func TestLoadAverageIsNoJudge(t *testing.T) {
	for _, c := range []struct {
		m    Machine
		want bool
	}{
		{Machine{Processors: 2, LoadBefore: 9, LoadAfter: 9, BusyBefore: 0.1, BusyAfter: 0.1},
			false},
		{Machine{Processors: 2, BusyBefore: 0.5}, true},
		{Machine{Processors: 2, BusyAfter: 2}, true},
		{Machine{Processors: 64, BusyBefore: 2}, false},
	} {
		if c.m.judge(); c.m.Indicative != c.want {
			t.Errorf("%+v", c.m)
		}
	}
}
