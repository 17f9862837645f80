// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// TestReplayUnderFaults has completions lost, late and refused, and connections that flap:
// the replay ends, and every byte is right. A completion that is lost costs a quarter of --timeout.
func TestReplayUnderFaults(t *testing.T) { replayUnderFaults(t, "8s", "prefill") }

func TestSoakReplayUnderFaults(t *testing.T) { replayUnderFaults(t, "20s", "both", "prefill") }

func replayUnderFaults(t *testing.T, limit string, sides ...string) {
	for _, side := range sides {
		r := replayReport(t, "--trace", smallTrace(t, 6), "--requests", "6", "--backend", "shm",
			"--timeout", limit,
			"--abort-rate", "0.2", "--fault", "slow,failing,lossy,flapping", "--fault-side", side)
		wantNumbers(t, r, map[string]float64{"requests": 6, "aborted": 1, "mismatches": 0,
			"leaked": 0})
		if r["faults"].(float64) < 10 || r["retried"].(float64) < 1 {
			t.Errorf("%s: %v faults, %v tried again", side, r["faults"], r["retried"])
		}
	}
}

// TestReplayFindsWhatBreaksTheContract proves that its digests can differ.
func TestReplayFindsWhatBreaksTheContract(t *testing.T) {
	o := sluice(t, "replay", "--model", smallModel, "--trace", smallTrace(t, 4), "--requests", "4",
		"--backend", "shm", "--fault", "corrupt", "--fault-side", "prefill")
	if o.status == 0 || !strings.Contains(o.stderr, "mismatches") ||
		!strings.Contains(o.stderr, "digests differ") {
		t.Errorf("%+v", o)
	}
}
