// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"fmt"
	"os"
)

// listens reports whether a program listens on a TCP port of the network namespace that
// the process is in.
func listens(pid, port int) bool {
	for _, table := range []string{"tcp", "tcp6"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue
		}
		want := fmt.Appendf(nil, ":%04X", port)
		for line := range bytes.Lines(b) {
			// sl local_address rem_address st ...; 0A is LISTEN
			f := bytes.Fields(line)
			if len(f) > 3 && bytes.HasSuffix(f[1], want) && string(f[3]) == "0A" {
				return true
			}
		}
	}
	return false
}
