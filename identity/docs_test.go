// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"crypto/x509"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestDocumentedCertificates runs the openssl commands of docs/between-hosts.md as they are
// printed, in order and in one folder. Members with what they make meet, and a member that the
// list names is refused.
func TestDocumentedCertificates(t *testing.T) {
	if out, err := exec.Command("openssl", "version").Output(); err != nil ||
		strings.HasPrefix(string(out), "OpenSSL 1.") {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "openssl",
			Reason: fmt.Sprintf("the command openssl of version 3.0 or later is not here (%s%v)",
				out, err), Fix: "apt-get install openssl"})
	}
	text, err := os.ReadFile("../docs/between-hosts.md")
	require.NoError(t, err)
	dir := t.TempDir()
	var members [2]*Identity
	ran := 0
	for _, part := range strings.Split(string(text), "```sh\n")[1:] {
		block, _, closed := strings.Cut(part, "```")
		require.True(t, closed)
		if !strings.Contains(block, "openssl ") {
			continue
		}
		c := exec.Command("sh", "-ec", block)
		c.Dir = dir
		out, err := c.CombinedOutput()
		require.NoError(t, err, "%s\n%s", block, out)
		ran++
		file := func(name string) string { return filepath.Join(dir, name) }
		switch ran {
		case 3: // the authority, a member and an empty list are there
			for i := range members {
				members[i] = must(FromFiles(file("decode-0.pem"), file("decode-0-key.pem"),
					file("ca.pem"), file("revoked.pem")))(t)
			}
			x, y := meet(t, members[0].CheckHost(), members[1], "decode-0.example")
			require.NoError(t, x)
			require.NoError(t, y)
			x, _ = meet(t, members[0].CheckHost(), members[1], "10.0.0.3")
			require.ErrorAs(t, x, new(x509.HostnameError))
		case 4: // the list of a running member has been replaced
			x, _ := meet(t, members[0], members[1], "")
			require.ErrorContains(t, x, "is revoked")
		}
	}
	require.Equal(t, 4, ran, "blocks of commands")
}
