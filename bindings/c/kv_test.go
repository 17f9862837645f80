// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// TestDetachWithoutProof: an operation of a cache of this process that has ended without a proof
// leaves none to a detach.
func TestDetachWithoutProof(t *testing.T) {
	r, other, op := new(engine.Region), new(engine.Region), new(kvOp)
	k := &kv{own: new(cache.Cache), attached: map[*engine.Region]bool{r: true, other: true},
		running: map[*kvOp]*engine.Region{op: r}, unproven: map[*engine.Region]bool{}}
	k.ended(op, engine.ErrUnproven)
	for range 2 {
		require.ErrorIs(t, k.detach(t.Context(), r), engine.ErrUnproven)
	}
	require.NoError(t, k.detach(t.Context(), other))
}
