// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestRoomIsNamed: a directory without room is named as the cause, with its cure. A directory
// that is not there has no room.
func TestRoomIsNamed(t *testing.T) {
	missing := &driver.UnavailableError{Backend: "ucx", Reason: "No resources are available",
		Fix: "x"}
	err := explainRoom(missing, "/no/such/directory")
	require.ErrorIs(t, err, driver.ErrUnavailable)
	require.ErrorContains(t, err, "No resources are available; /no/such/directory")
	require.ErrorContains(t, err, "room for 0 KiB")
	require.ErrorContains(t, err, "--shm-size=1g")
	require.Equal(t, error(missing), explainRoom(missing, t.TempDir()), "there is room")
	other := errors.New("other")
	require.Equal(t, other, explainRoom(other, "/no/such/directory"))
}
