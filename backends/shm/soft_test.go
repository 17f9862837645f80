// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// soft is a Shared of one page that could be cut under its peers.
type soft struct{ fd int }

func softShared(t *testing.T) *soft {
	t.Helper()
	fd, err := unix.MemfdCreate("soft", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	require.NoError(t, unix.Ftruncate(fd, 4096))
	return &soft{fd}
}

func (s *soft) Lend(f func([]driver.Extent) error) error {
	return f([]driver.Extent{{Len: 4096, FD: s.fd}})
}
func (s *soft) OnRenew(func() func() bool) func()           { return func() {} }
func (s *soft) Renew(context.Context, uint64, uint64) error { return nil }
func (s *soft) Enter()                                      {}
func (s *soft) TryEnter() bool                              { return true }
func (s *soft) Leave()                                      {}
