// SPDX-License-Identifier: Apache-2.0

//go:build race

package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRace has six threads of C use the same handles at random, under the race detector.
func TestRace(t *testing.T) {
	rounds := 5000
	if testing.Short() {
		rounds = 500
	}
	seed := int(time.Now().UnixNano() % 1e6)
	t.Logf("seed %d", seed)
	calls, codes, failed := hammerFromC(seed, rounds, t.TempDir())
	require.Zero(t, failed, "a close at the end")
	t.Logf("%d calls, %d succeeded", calls, codes[0])
	require.Greater(t, codes[0], calls/50)
}
