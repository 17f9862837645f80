// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
)

func TestList(t *testing.T) {
	nodes, err := ParseList("b=tcp:10.0.0.2:7000,a=unix:/run/a.sock")
	require.NoError(t, err)
	d, err := List(nodes, map[string]Namespace{"org/model": {Copies: 2}})
	require.NoError(t, err)
	v, changed := d.View()
	require.Nil(t, changed)
	require.Equal(t, "a", v.Nodes[0].Name)
	require.Equal(t, Node{Name: "b", Addresses: []string{"tcp:10.0.0.2:7000"}, Weight: 1},
		v.Nodes[1])
	network, address, err := SplitAddress(v.Nodes[0].Addresses[0])
	require.NoError(t, err)
	require.Equal(t, []string{"unix", "/run/a.sock"}, []string{network, address})
}

// TestRefused: nonsense is an error that says what is wanted.
func TestRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":                       "NAME=ADDRESS",
		"a":                      "unix:/PATH or tcp:HOST:PORT",
		"a=unix:x":               "unix:/PATH",
		"a=tcp:host":             "tcp:HOST:PORT",
		"a=tcp::7000":            "tcp:HOST:PORT",
		"a=tcp:host:0":           "tcp:HOST:PORT",
		"=unix:/x":               "1 to 255 bytes",
		"a/b=unix:/x":            "none of /",
		strings.Repeat("a", 256): "1 to 255 bytes",
		"a=unix:/" + strings.Repeat("a", addressMax): "unix:/PATH",
	} {
		_, err := ParseList(text)
		require.ErrorIs(t, err, engine.ErrBounds, text)
		require.ErrorContains(t, err, want)
	}
	good := Node{Name: "a", Addresses: []string{"unix:/x"}}
	for _, nodes := range [][]Node{{good, good}, make([]Node, NodesMax+1), {{Name: "a"}}} {
		_, err := List(nodes, nil)
		require.ErrorIs(t, err, engine.ErrBounds)
	}
	for _, n := range []Namespace{{Copies: -1}, {Copies: CopiesMax + 1}, {Priority: 8}} {
		_, err := List(nil, map[string]Namespace{"a": n})
		require.ErrorIs(t, err, engine.ErrBounds)
	}
	_, err := List(nil, map[string]Namespace{"": {}})
	require.ErrorIs(t, err, engine.ErrBounds)
}
