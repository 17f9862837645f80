// SPDX-License-Identifier: Apache-2.0

package sealed

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

const size = 8192

// TestOwnerWritesOthersRead has one side write what the other side sees and cannot change, nor cut.
func TestOwnerWritesOthersRead(t *testing.T) {
	leak.Check(t)
	fd, own, err := New("test", size, true)
	require.NoError(t, err)
	defer func() { _, _ = unix.Close(fd), unix.Munmap(own) }()
	if _, err := Map(fd, size, unix.PROT_READ|unix.PROT_WRITE); err == nil {
		t.Error("a page that only its owner writes to is mapped to be written to")
	}
	if _, err := Map(fd, size+1, unix.PROT_READ); !errors.Is(err, driver.ErrCorrupt) {
		t.Errorf("map more than there is: %v", err)
	}
	if err := unix.Ftruncate(fd, 0); err == nil {
		t.Error("the page was cut under its mappings")
	}
	theirs, err := Map(fd, size, unix.PROT_READ)
	require.NoError(t, err)
	defer func() { _ = unix.Munmap(theirs) }()
	Word(own, 4096).Store(0x0123456789abcdef)
	if got := Word(theirs, 4096).Load(); got != 0x0123456789abcdef {
		t.Errorf("read %#x", got)
	}
}

// TestMapRefusesWhatShrinks gives it descriptors that a peer could cut under the mapping, or that
// have no pages.
func TestMapRefusesWhatShrinks(t *testing.T) {
	leak.Check(t)
	soft, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(soft)
	require.NoError(t, unix.Ftruncate(soft, size))
	if _, err := Map(soft, size, unix.PROT_READ); !errors.Is(err, driver.ErrCorrupt) {
		t.Errorf("map what shrinks: %v", err)
	}
	if _, err := Map(-1, size, unix.PROT_READ); err == nil {
		t.Error("mapped no descriptor at all")
	}
}
