// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/sluicehq/sluice/csrc/cufile"
)

// systemConfig is what the library reads where the user names nothing else.
const systemConfig = "/etc/cufile.json"

// namesLogs finds logging.dir in a cufile.json that is not behind a comment.
var namesLogs = regexp.MustCompile(`(?m)^[^/\n]*"dir"\s*:\s*"[^"]`)

// logPlace is the file to name to the library, "" where the user has named one: it writes
// cufile.log into the working directory of the process unless its configuration, or its
// environment, says otherwise.
func logPlace(cfg *Config) (string, error) {
	if cfg.LogFile != "" {
		return cfg.LogFile, nil
	}
	log, path := cufile.Environment()
	if log != "" {
		return "", nil
	}
	if path == "" {
		path = systemConfig
	}
	if text, err := os.ReadFile(path); err == nil && namesLogs.Match(text) {
		return "", nil
	}
	dir, err := os.UserCacheDir() // this user's alone
	if err == nil {
		dir = filepath.Join(dir, "sluice")
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		var other error
		if dir, other = os.MkdirTemp("", "sluice-cufile-*"); other != nil {
			return "", fmt.Errorf("gds: make a folder for cuFile's log, or name Config.LogFile: %w",
				errors.Join(err, other))
		}
	}
	return filepath.Join(dir, "cufile.log"), nil
}
