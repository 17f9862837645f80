// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// TestDescriptorsAfterClose: a thread that asks for a descriptor while another closes the engine
// gets an error, or a number that was one.
func TestDescriptorsAfterClose(t *testing.T) {
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	e := &openEngine{gone: make(chan struct{})}
	e.inbox.init()
	e.Engine, err = engine.Open(engine.Config{Backends: []driver.Backend{b}})
	require.NoError(t, err)
	for _, descriptor := range []func() (int, error){
		func() (int, error) { return e.inbox.descriptor(e) }, e.ended.descriptor,
	} {
		fd, err := descriptor()
		require.NoError(t, err)
		require.Positive(t, fd)
		defer func() {
			_, err := descriptor()
			require.ErrorIs(t, err, engine.ErrClosed)
		}()
	}
	require.NoError(t, e.close())
}
