// SPDX-License-Identifier: Apache-2.0

//go:build race

package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRace has six threads of C use the same handles at random, under the race detector.
func TestRace(t *testing.T) { race(t, 1, 1500) }

func TestSoakRace(t *testing.T) {
	seed := int(time.Now().UnixNano() % 1e6)
	t.Logf("seed %d", seed)
	race(t, seed, 50000)
}

func race(t *testing.T, seed, rounds int) {
	calls, codes, failed := hammerFromC(seed, rounds, t.TempDir())
	require.Zero(t, failed, "a close at the end")
	t.Logf("%d calls, %d succeeded", calls, codes[0])
	require.Greater(t, codes[0], calls/50)
}
