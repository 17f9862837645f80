// SPDX-License-Identifier: Apache-2.0

package hostmem_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const sealedSize = 8192

// TestSealedOwnerWritesOthersRead has one side write what the other side sees and cannot change,
// nor cut.
func TestSealedOwnerWritesOthersRead(t *testing.T) {
	testkit.CheckLeaks(t)
	fd, own, err := hostmem.NewSealed("test", sealedSize, true)
	require.NoError(t, err)
	defer func() { _, _ = unix.Close(fd), unix.Munmap(own) }()
	if _, err := hostmem.MapSealed(fd, sealedSize, unix.PROT_READ|unix.PROT_WRITE); err == nil {
		t.Error("a page that only its owner writes to is mapped to be written to")
	}
	if _, err := hostmem.MapSealed(fd, sealedSize+1, unix.PROT_READ); !errors.Is(err,
		driver.ErrCorrupt) {
		t.Errorf("map more than there is: %v", err)
	}
	require.Error(t, unix.Ftruncate(fd, 0), "the page was cut under its mappings")
	theirs, err := hostmem.MapSealed(fd, sealedSize, unix.PROT_READ)
	require.NoError(t, err)
	defer func() { _ = unix.Munmap(theirs) }()
	hostmem.SharedWord(own, 4096).Store(0x0123456789abcdef)
	require.EqualValues(t, 0x0123456789abcdef, hostmem.SharedWord(theirs, 4096).Load(), "read")
}

// TestMapSealedRefusesWhatShrinks gives it descriptors that a peer could cut under the mapping, or
// that have no pages.
func TestMapSealedRefusesWhatShrinks(t *testing.T) {
	testkit.CheckLeaks(t)
	soft, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(soft)
	require.NoError(t, unix.Ftruncate(soft, sealedSize))
	if _, err := hostmem.MapSealed(soft, sealedSize, unix.PROT_READ); !errors.Is(err,
		driver.ErrCorrupt) {
		t.Errorf("map what shrinks: %v", err)
	}
	if _, err := hostmem.MapSealed(-1, sealedSize, unix.PROT_READ); err == nil {
		t.Error("mapped no descriptor at all")
	}
}
