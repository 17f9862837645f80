// SPDX-License-Identifier: Apache-2.0

package standin

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// VerbsSysfs makes a folder in which class/infiniband is as the kernel would show the first n
// devices, all up. Device i has the GID of 10.99.0.(i+1) at index 1, of type RoCE v2, and a
// link-local one at index 0.
func VerbsSysfs(t testing.TB, n int) string {
	t.Helper()
	root := t.TempDir()
	for i := range n {
		files := map[string]string{
			"ports/1/state":      "4: ACTIVE",
			"ports/1/phys_state": "5: LinkUp",
			"ports/1/rate":       "100 Gb/sec (4X EDR)",
			"ports/1/lid":        "0x0",
			"ports/1/link_layer": "Ethernet",
			"ports/1/gids/0": fmt.Sprintf("fe80:0000:0000:0000:0000:0000:0000:%04x",
				i+1),
			"ports/1/gids/1": fmt.Sprintf("0000:0000:0000:0000:0000:ffff:0a63:%04x",
				i+1),
			"ports/1/gid_attrs/types/0":  "RoCE v2",
			"ports/1/gid_attrs/types/1":  "RoCE v2",
			"ports/1/gid_attrs/ndevs/0":  "lo",
			"ports/1/gid_attrs/ndevs/1":  "lo",
			"node_type":                  "1: CA",
			"device/numa_node":           "-1",
			"device/vendor":              "0x0000",
			"ports/1/counters/port_xmit": "0",
		}
		for name, text := range files {
			file := filepath.Join(root, "class", "infiniband", VerbsDevice{i}.Name(),
				filepath.FromSlash(name))
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(text+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return root
}
