// SPDX-License-Identifier: Apache-2.0

package session

import (
	"fmt"
	"io"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHungUp(t *testing.T) {
	for _, err := range []error{io.EOF, syscall.ECONNRESET} {
		require.True(t, HungUp(fmt.Errorf("read: %w", err)))
	}
	require.False(t, HungUp(syscall.ECONNREFUSED))
}
