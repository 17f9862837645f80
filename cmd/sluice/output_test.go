// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestProgressInAPipe: who has no terminal reads a line every sayEvery, and not more.
func TestProgressInAPipe(t *testing.T) {
	var out bytes.Buffer
	p := newProgress(&out, 200, "bench shm")
	p.set(10)
	require.Empty(t, out.String())
	p.said = time.Now().Add(-sayEvery)
	p.began = p.said
	p.set(50)
	p.set(51)
	p.clear()
	require.Equal(t, "bench shm: 25 % done, some 30s to go\n", out.String())
}
