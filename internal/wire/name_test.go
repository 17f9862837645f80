// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func TestNames(t *testing.T) {
	for _, good := range []string{"", "kv", "layer.0/K V", "größe", "层",
		strings.Repeat("n", NameMax)} {
		require.NoError(t, CheckName(good), good)
	}
	for _, bad := range []string{"kv\x1b[2K", "two\nrows", "\x00", "del\x7f", "\u0085", "\xff\xfe",
		strings.Repeat("n", NameMax+1)} {
		require.ErrorIs(t, CheckName(bad), driver.ErrBounds, "%q", bad)
	}
}

// TestHostileNames: a description whose peer writes between the lines is none.
func TestHostileNames(t *testing.T) {
	d := Description{Backends: []Backend{{Name: "tcp"}}, Regions: []Region{{Name: "kv", Size: 1}}}
	_, err := Encode(nil, &d)
	require.NoError(t, err)
	for _, change := range []func(){
		func() { d.Regions[0].Name = "kv\x1b[1A" },
		func() { d.Name, d.Regions[0].Name = "a\rb", "kv" },
		func() { d.Name, d.Backends[0].Name = "", "t\tcp" },
	} {
		change()
		_, err := Encode(nil, &d)
		require.ErrorIs(t, err, driver.ErrBounds)
	}
}
