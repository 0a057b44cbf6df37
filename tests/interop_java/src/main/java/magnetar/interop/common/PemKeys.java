package magnetar.interop.common;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyPair;
import java.security.KeyPairGenerator;
import java.util.Base64;

/** A public and a private key in files, as long as it is open. */
public final class PemKeys implements AutoCloseable {
    private static final int BITS = 2048;
    private static final int LINE = 64;

    private final Path folder;

    public PemKeys() throws IOException, GeneralSecurityException {
        KeyPairGenerator generator = KeyPairGenerator.getInstance("RSA");
        generator.initialize(BITS);
        KeyPair pair = generator.generateKeyPair();
        folder = Files.createTempDirectory("keys");
        write(publicKey(), "PUBLIC KEY", pair.getPublic().getEncoded());
        write(privateKey(), "PRIVATE KEY", pair.getPrivate().getEncoded());
    }

    public Path publicKey() {
        return folder.resolve("public.pem");
    }

    public Path privateKey() {
        return folder.resolve("private.pem");
    }

    private static void write(Path file, String what, byte[] key) throws IOException {
        String text = Base64.getMimeEncoder(LINE, new byte[] {'\n'}).encodeToString(key);
        String ends = "-----%s " + what + "-----\n";
        Files.writeString(file, ends.formatted("BEGIN") + text + "\n" + ends.formatted("END"));
    }

    @Override
    public void close() throws IOException {
        Files.delete(publicKey());
        Files.delete(privateKey());
        Files.delete(folder);
    }
}
