// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
)

// TestRevokeAgainAfterARefusal revokes memory whose registration the device keeps at first:
// the second Revoke is nil only because that has ended.
func TestRevokeAgainAfterARefusal(t *testing.T) {
	f, _, p, _, _, _ := openOneRail(t)
	d := f.Device(0)
	before := d.Get(fakeverbs.Regions)
	m := register(t, p.near, 1<<20)
	d.Set(fakeverbs.DeregisterBusy, 1)
	require.Error(t, m.Revoke(context.Background()))
	require.Greater(t, d.Get(fakeverbs.Regions), before)
	require.NoError(t, m.Revoke(context.Background()))
	require.Equal(t, before, d.Get(fakeverbs.Regions))
	require.NoError(t, m.Revoke(context.Background()))
}

// TestBackendClosesWhatWasRefused: memory whose own Revoke has failed is the backend's to end: its
// Close is nil only where the device has given the pages up.
func TestBackendClosesWhatWasRefused(t *testing.T) {
	f, c, p, _, _, _ := openOneRail(t)
	d := f.Device(0)
	m := register(t, p.near, 1<<20)
	d.Set(fakeverbs.DeregisterBusy, 1)
	require.Error(t, m.Revoke(context.Background()))
	require.NoError(t, c.during(t, p.near.Close))
	require.Empty(t, p.near.table.All())
	require.NoError(t, m.Revoke(context.Background()))
}
